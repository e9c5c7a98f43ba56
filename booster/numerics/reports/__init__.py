"""What was recorded, summed up, compared and drawn.

`summarise` makes numbers of a run once; a terminal, a page and `--json` show the same ones. Pictures are SVG text that the page
holds, so it is one file that loads nothing::

    booster report runs/first                    ->  summary  ->  terminal   tables, by rich
    booster report runs/first --html first.html  ->  summary  ->  page       panels with pictures, by matplotlib
    booster compare runs/a runs/b                ->  compare                 the first step in which they part, and by what
    booster.numerics.report(optimizer)           ->  terminal                gradients as they are now

In reading order:

    summary           `Summary`, and `OptimizerSummary` for each optimizer
    terminal, page    what shows one; `report` of terminal is the table of one moment
    pictures          lines, bars and maps of shares
    compare           `compare`: differences that two formats do not explain

Nothing is computed twice: a number that is to be shown in both places belongs into `summary`. Texts of a record may come from
anyone's file, so they are escaped, for a terminal by rich and for a page by `html.escape` and matplotlib.
"""
