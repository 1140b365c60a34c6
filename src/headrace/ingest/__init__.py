"""Raw data -> shards: readers, tokenizers, the plan of tasks, one task, and the processes that run them."""
