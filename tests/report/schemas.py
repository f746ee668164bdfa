"""The constraints of SARIF 2.1.0 and of JUnit files (Ant's schema, the strictest in use) on what reports have, in short.

Whole reports of all verdicts were also validated against the official files of both.
"""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

TEXT = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"], "additionalProperties": False}
LOCATION = {
    "type": "object",
    "properties": {
        "physicalLocation": {
            "type": "object",
            "properties": {
                "artifactLocation": {
                    "type": "object",
                    "properties": {
                        "uri": {"type": "string", "pattern": r"^[A-Za-z0-9._~:/%@!$&'()*+,;=-]+$"},
                        "uriBaseId": {"enum": ["SRCROOT"]},
                    },
                    "required": ["uri"],
                    "additionalProperties": False,
                },
                "region": {
                    "type": "object",
                    "properties": {"startLine": {"type": "integer", "minimum": 1}},
                    "required": ["startLine"],
                    "additionalProperties": False,
                },
            },
            "required": ["artifactLocation"],
            "additionalProperties": False,
        },
        "message": TEXT,
    },
    "additionalProperties": False,
}
RESULT = {
    "type": "object",
    "properties": {
        "ruleId": {"type": "string"},
        "ruleIndex": {"type": "integer", "minimum": 0},
        "level": {"enum": ["none", "note", "warning", "error"]},
        "message": TEXT,
        "locations": {"type": "array", "items": LOCATION},
        "relatedLocations": {"type": "array", "items": LOCATION, "uniqueItems": True},
        "partialFingerprints": {"type": "object", "additionalProperties": {"type": "string"}},
        "properties": {"type": "object"},
    },
    "required": ["message", "ruleId", "ruleIndex", "level", "partialFingerprints"],
    "additionalProperties": False,
}
RULE = {
    "type": "object",
    "properties": {"id": {"type": "string"}, "shortDescription": TEXT},
    "required": ["id", "shortDescription"],
    "additionalProperties": False,
}
DRIVER = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "semanticVersion": {"type": "string"},
        "rules": {"type": "array", "items": RULE, "uniqueItems": True},
    },
    "required": ["name"],
    "additionalProperties": False,
}
RUN = {
    "type": "object",
    "properties": {
        "tool": {"type": "object", "properties": {"driver": DRIVER}, "required": ["driver"], "additionalProperties": False},
        "invocations": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"executionSuccessful": {"type": "boolean"}, "exitCode": {"type": "integer"}},
                "required": ["executionSuccessful"],
                "additionalProperties": False,
            },
        },
        "originalUriBaseIds": {"type": "object", "additionalProperties": {"type": "object", "properties": {"description": TEXT}}},
        "columnKind": {"enum": ["utf16CodeUnits", "unicodeCodePoints"]},
        "results": {"type": "array", "items": RESULT},
        "properties": {"type": "object"},
    },
    "required": ["tool", "results"],
    "additionalProperties": False,
}
SARIF: dict[str, Any] = {
    "type": "object",
    "properties": {
        "$schema": {"type": "string"},
        "version": {"enum": ["2.1.0"]},
        "runs": {"type": "array", "items": RUN},
    },
    "required": ["version", "runs"],
    "additionalProperties": False,
}

# Of every element: attributes that it must have and may have, and its children in order (`*`: any number).
JUNIT: dict[str, tuple[set[str], set[str], list[str]]] = {
    "testsuites": (set(), set(), ["testsuite*"]),
    "testsuite": (
        {"name", "timestamp", "hostname", "tests", "failures", "errors", "time", "package", "id"},
        set(),
        ["properties", "testcase*", "system-out", "system-err"],
    ),
    "properties": (set(), set(), ["property*"]),
    "property": ({"name", "value"}, set(), []),
    "testcase": ({"name", "classname", "time"}, set(), ["failure|error|skipped?"]),
    "failure": ({"type"}, {"message"}, []),
    "error": ({"type"}, {"message"}, []),
    "system-out": (set(), set(), []),
    "system-err": (set(), set(), []),
}


def check_junit(element: ElementTree.Element) -> None:
    """Raises AssertionError for an element that the schema does not allow."""
    must, may, children = JUNIT[element.tag]
    assert must <= set(element.attrib) <= must | may, element.attrib
    left = [c.tag for c in element]
    for wanted in children:
        names, many, optional = set(wanted.rstrip("*?").split("|")), wanted.endswith("*"), wanted.endswith(("*", "?"))
        count = 0
        while left and left[0] in names and (many or not count):
            left.pop(0)
            count += 1
        assert count or optional, f"{element.tag} without {wanted}"
    assert not left, f"{element.tag} has {left}"
    for c in element:
        check_junit(c)
