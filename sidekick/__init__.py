"""Sidekick brings one machine to its host profile, and can prove it.

report    what is wanted, changed and found: the values that are printed, stored and read
profile   profiles: TOML with conditions and expressions, inherited, decoded strictly
setting   what each kind of setting can do: observe, plan, apply, verify, undo
settings  the kinds themselves; a new one is a module and a line there
bootline  pure: the kernel command line, sidekick's arguments and the host's own
loaders   GRUB, systemd-boot, none: sidekick's entry next to the host's own
boot      the owner of the boot line: combines the arguments of all settings into one entry
plan      pure: wanted and observed values -> ordered changes and their disruption
targets   what a profile asks of this host, with its conflicts
state     what must survive a crash: originals, the applied profile, the change journal
observe   one observation of the host: wanted values, found values, planned changes
reboot    whether and how the host can be rebooted into a new kernel command line
status    the state of the host: verify, status; nothing is changed
seen      records what a verify read, for `look`
look      the timer's check of an unchanged host: a script for a bare interpreter
results   what a run wrote, with the outcome of each setting, and its report
apply     one run: claim, journal, change, read back; on failure undo in reverse
trial     a profile that is reverted unless it is confirmed
grammar   what commands take; click_commands: the same for click, and completion
context   the global options of a command, and the host
cli       the commands
"""
