"""What a replica does with a call: template, tools, reasoning, choices, settlement of orphans."""
