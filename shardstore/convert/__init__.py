"""Conversion between checkpoint formats: without ranks, piece by piece, resumable, verified."""

from shardstore.convert.conversion import DEFAULT_FILE_BYTES as DEFAULT_FILE_BYTES
from shardstore.convert.conversion import FORMATS as FORMATS
from shardstore.convert.conversion import TARGET_FORMATS as TARGET_FORMATS
from shardstore.convert.conversion import Conversion as Conversion
from shardstore.convert.conversion import convert as convert
