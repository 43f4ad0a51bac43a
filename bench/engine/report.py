"""stub"""

import json


def markdown(r):
    return json.dumps({k: v for k, v in r.items() if k != "records"}, indent=1)


def write_docs(a, b):
    pass
