"""A rehearsal as JUnit XML, which CI systems show as tests: one suite a file, one case a question."""

from collections.abc import Sequence
from xml.etree import ElementTree

from accel_parallel.rehearsal.check import Rehearsal


def to_junit(rehearsals: Sequence[Rehearsal]) -> str:
    """The document. Characters that XML 1.0 does not allow are left out."""
    root = ElementTree.Element("testsuites", name="accel-parallel rehearse")
    for rehearsal in rehearsals:
        failed = [check for check in rehearsal.checks if check.holds is False]
        skipped = [check for check in rehearsal.checks if check.holds is None]
        suite = ElementTree.SubElement(
            root,
            "testsuite",
            name=rehearsal.name,
            tests=str(len(rehearsal.checks)),
            failures=str(len(failed)),
            skipped=str(len(skipped)),
            time=f"{rehearsal.seconds:.1f}",
        )
        for check in rehearsal.checks:
            case = ElementTree.SubElement(suite, "testcase", classname=rehearsal.name, name=check.question)
            if check.holds is None:
                ElementTree.SubElement(case, "skipped", message=_allowed(check.summary))
            elif not check.holds:
                failure = ElementTree.SubElement(case, "failure", message=_allowed(check.summary))
                failure.text = _allowed("\n".join(check.mismatches))
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _allowed(text: str) -> str:
    return "".join(character for character in text if character.isprintable() or character in "\n\t")
