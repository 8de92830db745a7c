"""`dflash-serve certify`: one verdict on a deployment, from the dry run, `verify`, `bench` and `doctor`."""
