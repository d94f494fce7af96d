"""Sidekick brings one machine to its host profile, and can prove it.

report    what is wanted, changed and found: the values that are printed, stored and read
profile   profiles: TOML, rendered with the host's facts, inherited, decoded strictly
setting   what each kind of setting can do: observe, plan, apply, verify, undo
settings  the kinds themselves: sysctl, hugepages, kernel command line
plan      pure: wanted and observed -> ordered changes and the reboot they need
state     what must survive a crash: originals, the applied profile, the change journal
reboot    whether and how the host can be rebooted into a new command line
standing  how the host stands: verify, status; nothing is changed
apply     one run: claim, journal, change, read back; on failure undo in reverse
cli       the commands
"""
