"""Devices that run a program: lanes with events, copies, weight slabs."""
