"""The directory of tasks per machine."""

from control_plane.allocator.task_directory import TaskDirectory


def test_a_query_of_a_machine_without_tasks_makes_no_entry_for_it():
    directory = TaskDirectory()
    assert dict(directory.tasks("m1")) == {}
    assert directory.jobs("m1") == set()
    assert directory.leaving("m1") == []
    assert directory._on == {}
