"""``halox bench ddtbench``: the patterns of DDTBench between two ranks, with its phases."""
