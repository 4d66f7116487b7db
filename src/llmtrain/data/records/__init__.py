"""Files of records: JSON lines, JSON arrays, CSV and Parquet, read in parts.

Start with base.py (what a file of records offers) and open_file.py (which format a file has); usable.py decides what
happens to records that cannot be used.
"""
