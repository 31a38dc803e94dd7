"""Makes jobset.json from the definition of JobSet, which the project publishes as a CRD.

    git clone --branch v0.12.0 https://github.com/kubernetes-sigs/jobset
    python -m tests.launch.schemas.make jobset/config/components/crd/bases/*_jobsets.yaml

Descriptions are left out, and so is the template of pods, which the definition copies from
Kubernetes: the tests validate it with Kubernetes' own schema. The API server refuses unknown fields
if a client asks it to, as kubectl does, so they are refused here.
"""

import json
import pathlib
import sys

import yaml

VERSION = "v1alpha2"
TARGET = pathlib.Path(__file__).with_name("jobset.json")


def trimmed(schema):
    """The JSON schema without descriptions and without unknown fields."""
    if isinstance(schema, list):
        return [trimmed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found = {
        name: {field: trimmed(item) for field, item in value.items()}
        if name == "properties"
        else trimmed(value)
        for name, value in schema.items()
        if name != "description" and not name.startswith("x-kubernetes-list")
    }
    if "properties" in schema:
        found["additionalProperties"] = False
    return found


def main():
    definition = yaml.safe_load(pathlib.Path(sys.argv[1]).read_text())
    (schema,) = (
        version["schema"]["openAPIV3Schema"]
        for version in definition["spec"]["versions"]
        if version["name"] == VERSION
    )
    del schema["properties"]["status"]  # written by the controller
    jobs = schema["properties"]["spec"]["properties"]["replicatedJobs"]["items"]["properties"]
    jobs["template"]["properties"]["spec"]["properties"]["template"] = {"type": "object"}
    TARGET.write_text(json.dumps(trimmed(schema), indent=1) + "\n")


if __name__ == "__main__":
    main()
