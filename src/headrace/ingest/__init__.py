"""Raw data -> shards: the plan of tasks, a single task, and the processes that run them."""
