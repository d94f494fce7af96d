"""Builds what the lab boots: layers cached by the hash of their recipe.

    build    the layers of the guest's disk: base, dependencies, project
    initrd   the small initrd that halves the boot under TCG
    recipe   runs the scripts
    app      the demo application's image, two versions of it

The shell scripts in this folder are the recipes; each runs in a mount
namespace of its own, so that an interrupted build leaves no mount behind.
"""
