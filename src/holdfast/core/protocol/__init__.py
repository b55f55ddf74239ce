"""Messages between the processes of a run, and the layout of the status page.

- ``messages``: between agent, controller and worker.
- ``peer_messages``: between agents, and in elections.
- ``health_messages``: progress of workers, evidence of hangs, step times, digests of the state.
- ``layout_messages``: the layouts of all ranks.
- ``notices``: nodes that will leave.
- ``status_page``: the words and bits of the page.
"""
