"""A holder for tests that finds no place for control groups, whatever the machine has."""

from posttrain.sandbox import keeper


def main() -> None:
    keeper.cgroup_places = lambda own, mountinfo: ()
    keeper.main()
