"""The laws that members of a family must satisfy, for those of this package and for yours.

`check("aggregators", "my_pkg.my_mod:rule")` runs all of them; `cases` gives them one by one, as parameters of a test;
`python -m atoll.testing aggregators my_pkg.my_mod:rule` prints them.
"""

from atoll.testing.law import Case, LawError, Member, cases, check, families, laws

__all__ = ["Case", "LawError", "Member", "cases", "check", "families", "laws"]
