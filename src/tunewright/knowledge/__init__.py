"""What is known about kernels: keys, records, and the databases that hold them.

Nothing here measures or decides.
"""
