"""The hosts' agents, as the control plane knows them: their API, what they last reported
(observations), and the dispatcher, the only sender of commands to them. Nothing here decides what a
task should do, and nothing is stored: after a start every agent is asked again.
"""
