"""How far a model's positions hold, measured: reach, full passes with recall, passkey, and what they say together."""

from theodolite.survey.reach import Spread
from theodolite.survey.run import survey
from theodolite.survey.settings import Settings

__all__ = ["Settings", "Spread", "survey"]
