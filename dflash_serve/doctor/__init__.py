"""Why acceptance is low: what each known fault would make of it, against what was observed."""
