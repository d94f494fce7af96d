"""Job control: what each writer wants of a job, composed into what the scheduler carries out."""
