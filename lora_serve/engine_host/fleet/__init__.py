"""The engines of `--engine ray`: replicas of a Ray Serve deployment, each with a whole engine. Ray is an extra."""
