"""What `make serve` prints when the service is ready: all that is needed for a first call."""

from __future__ import annotations


def banner(base_url: str, api_key: str, dashboard_url: str | None, home: str, metrics_url: str) -> str:
    """Text for a terminal; both snippets work when pasted."""
    dashboard = dashboard_url or "off"
    return f"""
  serve-app is ready.

  base address    {base_url}   (or {base_url}/v1)
  API key         {api_key}
  Ray dashboard   {dashboard}
  metrics         {metrics_url}
  state folder    {home}

  With curl:

curl {base_url}/v1/chat/completions \\
  -H "Authorization: Bearer {api_key}" \\
  -H "Content-Type: application/json" \\
  -d '{{"model": "svc-chat", "temperature": 0,
       "messages": [{{"role": "user", "content": "What is the capital of France?"}}]}}'

  With the SDK (pip install openai):

from openai import OpenAI

client = OpenAI(base_url="{base_url}/v1", api_key="{api_key}")
reply = client.chat.completions.create(
    model="svc-chat",
    temperature=0,
    messages=[{{"role": "user", "content": "What is the capital of France?"}}],
)
print(reply.choices[0].message.content)

  Ctrl-C stops everything.
"""
