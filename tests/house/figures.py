"""The figures of a tree, in the order of the table, and the bar that each should reach.

Each figure is one function of a Tree to an int; its docstring's first line is what the table says of it. Unless that
says otherwise, only the four packages are counted: no tests, examples, benchmarks or chart scripts.
"""

from collections.abc import Callable

from tests.house import names, reach, sizes, untyped
from tests.house.tree import Tree

FIGURES: tuple[tuple[Callable[[Tree], int], str], ...] = (
    (sizes.count_lines, "50,000"),
    (sizes.count_lines_of_scripts, ""),
    (sizes.count_lines_of_tests, ""),
    (sizes.count_files_of_largest_folder, "14"),
    (sizes.count_full_folders, "0"),
    (sizes.count_long_files, "few"),
    (sizes.count_lines_of_median_function, "about 10"),
    (sizes.count_long_functions, "few"),
    (untyped.count_anys, "300"),
    (untyped.count_dicts_of_any, ""),
    (untyped.count_literal_subscripts, "150"),
    (untyped.count_jobs_by_name, "0"),
    (untyped.count_loose_job_parameters, "0"),
    (names.count_repeated_class_names, "0"),
    (names.count_public_participles, "0"),
    (names.count_private_participles, "0"),
    (names.count_docstrings, ""),
    (names.count_docstrings_with_errors, ""),
    (names.count_docstrings_with_shapes, ""),
    (reach.count_untested_commands, "0"),
    (reach.count_circles, "0"),
    (reach.count_contracts, "one a room"),
    (reach.count_pull_modules, "20"),
    (reach.count_pull_rooms, ""),
    (reach.count_functions_called_pull, "1"),
    (reach.count_publish_modules, "half"),
    (reach.count_publish_rooms, "half"),
    (sizes.count_readme_lines, "120"),
    (sizes.count_long_prose, "0"),
)
