"""SJD-PAC inside vLLM: arguments, scheduler, worker, runner, sampler, attention."""
