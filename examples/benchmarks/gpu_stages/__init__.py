"""The stages of `gpu.py`: each module has `cases(context)`, the list of what it measures, most important first.

rows        one figure, what it should be, and a verdict
cases       a case, what every case is given, and the loop over the cases of a stage in one process
processes   a stage from outside: its processes, their time, what they have written
record      all stages: their shares of the time, the JSON file
table       the rows, worst first
checkout    the package of this checkout where it is not installed
"""
