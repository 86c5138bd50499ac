"""Large data, converted once and then opened as memory maps.

arrays.py: write arrays in pieces; store.py: entries on disk; parties.py: parties as entries.
"""
