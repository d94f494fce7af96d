"""Sidekick brings one machine to its host profile, and proves it.

report    changes, results and states: the values that are printed, stored and read
profile   profiles: TOML with conditions and expressions, inherited, decoded strictly
setting   the interface of each kind of setting: observe, plan, apply, verify, undo
settings  the kinds; a new kind is a module there and a line in its `__init__`
bootline  pure: the kernel command line, sidekick's arguments and the host's own
loaders   boot loaders (GRUB, systemd-boot, none) with sidekick's entry next to the host's own
boot      combines the kernel arguments of all settings into one boot entry
plan      pure: wanted and observed values -> ordered changes and their disruption
targets   what a profile asks of this host, and conflicts between its settings
state     the folder that survives a crash: record, change journal, last report
observe   one observation of the host: wanted values, observed values, planned changes
reboot    whether and how the host can be rebooted into a new kernel command line
status    the state of the host: verify, status; nothing is changed
look      the timer's check of an unchanged host: a script for a bare interpreter
results   what a run wrote, with the outcome of each setting, and its report
apply     one run: claim, journal, change, read back; on failure undo in reverse

read_recorder  records what `verify` reads, so that `look` can repeat it
write_order    finds an order of writes that the kernel accepts
unattended     runs without an operator: after a boot, by the timer
trial     a profile that is reverted unless it is confirmed
grammar   the command line, declared once; click_commands: the same for click, and completion
context   the global options of a command, and the host
cli       the commands
"""
