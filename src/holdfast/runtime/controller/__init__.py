"""The process of the controller, of which a job has one."""
