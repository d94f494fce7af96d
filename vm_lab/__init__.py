"""Virtual machines to try Twine on: vagrant and libvirt in a separate network namespace.

cli       the `twine-lab` command
lab       what each command does, in order
sandbox   namespaces, private libvirtd, the lab's network
vagrant   the `vagrant` program, driven inside the sandbox
domains   power, snapshots and network links of the VMs, through virsh
guests    ssh into the VMs, and pushing the working tree to them
control   the lab's control plane, and joining machines to it
accel     KVM if it really runs a guest, otherwise TCG
topology  the rack, MSB and data center of each VM
state     where a lab keeps its files, and how it finds its processes again
wheel     the working tree as a wheel, and the wheels it depends on
image/    builds the guest's disk, kernel and initrd, and the demo application's image
"""
