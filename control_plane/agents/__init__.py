"""The hosts' agents, as the control plane knows them: what may be asked of one, what they last
said (observations), and the dispatcher, the only way to tell one something. Nothing here decides
what a task should do, and nothing is stored: after a start everything is asked again.
"""
