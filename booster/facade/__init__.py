"""The steps of the facade: what `Booster` checks, describes and hands on."""
