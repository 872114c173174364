"The reward of chaos_child.py, in a module that a fresh process imports at once."


def scores(completions, **_):
    "One for each digit, a tenth for anything else."
    return [sum(1.0 if c.isdigit() else 0.1 for c in text) for text in completions]
