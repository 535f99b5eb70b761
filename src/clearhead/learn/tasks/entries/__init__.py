"""One module for each kind of task. A module in this folder is found by `tasks.table`."""
