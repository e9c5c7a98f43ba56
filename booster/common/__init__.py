"""What every room asks, and what asks no room: arguments, text, files, frames, random states, and torch's private names.

The idea: a thing that three rooms need in the same way is here once, with one meaning. An example, the errors of options:

    arguments.count("steps", steps, least=1)    the value as an int, or an error that every user can read the same way:
                                                steps=0 is not legal; it must be a whole number of at least 1

Files in reading order:

    arguments.py         checks of arguments, all of one form of message; names in a sentence, columns, names of dtypes
    devices.py           which device, its clock, copies to and from it that do not wait
    misuse.py            who called, and which line of the user's code an error comes from; hooks on the user's own model and
                         optimizer that notice when they are used in place of the boosted ones
    snapshot.py          what Python or torch may change, kept and put back; states of all random generators
    untrusted_files.py   regular files alone, JSON of a bounded size, new files through no link
    installed.py         versions of packages, and which `apex` there is
    hang_watchdog.py     the thread that names ranks that are missing where others wait; values that ranks post to the store of
                         their group, without a collective
    torch_internals/     the private names of torch: a room with a head

What may be touched: all of it, with care for who asks. A function that only one room calls belongs to that room. Nothing here
imports another room of booster, and importing it imports torch alone.
"""
