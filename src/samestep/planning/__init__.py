"""What a recipe will do, before it does it: dtypes, memory and the updates that rounding will make vanish."""
