"""The stages of `gpu.py`: each module has `cases(context)`, the list of its measurements, most important first.

rows        one figure, its expected value, and a verdict
cases       a case, its context, and the loop over the cases of a stage in one process
processes   a stage from outside: its processes, their time, the rows that they have written
record      all stages: their shares of the time, the JSON file
table       all rows as a table, worst first
checkout    imports the package from this checkout if it is not installed
"""
