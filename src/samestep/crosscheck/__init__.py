"""A migrated configuration against its source: both are run on a tiny model, and what they did is compared by value."""
