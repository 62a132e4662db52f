"""The fields of request bodies; unknown ones are ignored, null is the same as missing, types are strict."""
