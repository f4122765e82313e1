"""The machine: cores, control groups, memory pages, open files."""
