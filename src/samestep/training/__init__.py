"""The main job: launch the ranks, run the steps, leave a run folder behind."""
