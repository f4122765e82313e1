"""The machine: its cores, control groups, huge pages, and the limit of open files."""
