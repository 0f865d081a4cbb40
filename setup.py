"""Lets installers without support for setup.cfg find it; the metadata lies there."""

from setuptools import setup

setup()
