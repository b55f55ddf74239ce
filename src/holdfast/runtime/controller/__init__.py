"""The process of the controller, of which each job has one."""
