"""Errors in user input, and text from outside as it may be shown."""

from megatron3d.errors.user_error import UserError

__all__ = ["UserError"]
