"""Terminal kinds about data: logs, text pipelines, tables, JSON, SQLite.

Each function is one kind and one template; levels go from one short command to several. The one
thing that must stay true: its `commands`, run in a workspace with its files, meet its goals and
its gates.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict

from posttrain.core.task import Json
from posttrain.domains.families.terminal_scene import (
    FOLDERS,
    NOUNS,
    Draw,
    Scene,
    holds,
    is_json,
    names,
    prose,
    selects,
    unharmed,
)


def logs(draw: Draw, level: int) -> Scene:
    """Read a log: count a level, name the host with most errors, rank hosts in a time span."""
    path = f"{draw.choice(NOUNS)}.log"
    hosts = names(draw, 5)
    weights = [9, 5, 3, 2, 1]
    mix = [draw.randint(1, 9), draw.randint(1, 9), draw.randint(3, 9)]
    lines, errors = [], []
    for number in range(draw.randint(150, 250)):
        hour = 8 + number // 60
        kind = draw.choices(("INFO", "WARN", "ERROR"), weights=mix)[0]
        host = draw.choices(hosts, weights=weights)[0]
        lines.append(f"{hour:02}:{number % 60:02} {kind} {host} {draw.choice(NOUNS)}\n")
        if kind == "ERROR":
            errors.append((hour, host))
    if level == 0:
        kind = draw.choice(("INFO", "WARN", "ERROR"))
        objective = f"Count the {kind} lines of {path}. Write the number to count.txt."
        out, expected = "count.txt", f"{sum(f' {kind} ' in line for line in lines)}\n"
        commands: tuple[str, ...] = (f"grep -c {kind} {path} > count.txt",)
    elif level == 1:
        first, second = Counter(host for _, host in errors).most_common(2)
        if first[1] == second[1]:
            return logs(draw, level)
        objective = f"Write the name of the host with the most ERROR lines in {path} to host.txt."
        out, expected = "host.txt", f"{first[0]}\n"
        commands = (
            f"grep ERROR {path} | cut -d ' ' -f 3 | sort | uniq -c | sort -rn",
            f"echo {first[0]} > host.txt",
        )
    else:
        hour = draw.randint(8, 9)
        counts = Counter(host for at, host in errors if at == hour)
        ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        objective = (
            f"For the hour from {hour:02}:00 to {hour:02}:59 in {path}, count the ERROR lines of "
            "each host that has any. Write `host count` lines to report.txt, highest count first, "
            "equal counts in alphabetical order."
        )
        out, expected = "report.txt", "".join(f"{host} {count}\n" for host, count in ranked)
        commands = (
            f"grep '^{hour:02}:' {path} | grep ERROR | cut -d ' ' -f 3 | sort | uniq -c"
            " | sort -k1,1nr -k2,2 | awk '{print $2, $1}' > report.txt",
        )
    files = {path: "".join(lines)}
    return Scene(
        objective=objective,
        files=files,
        commands=commands,
        goals=(holds(out, expected),),
        gates=(unharmed(files, out),),
    )


def pipeline(draw: Draw, level: int) -> Scene:
    """Shape text: sort lines, the most frequent words, sums by group."""
    path, out = (f"{name}.txt" for name in names(draw, 2))
    if level == 0:
        words = names(draw, 8)
        text = "".join(f"{word}\n" for word in words)
        objective = f"Sort the lines of {path} into {out}."
        expected = "".join(f"{word}\n" for word in sorted(words))
        commands = (f"sort {path} > {out}",)
    elif level == 1:
        ranked = draw.sample(NOUNS, 6)
        words = [word for rank, word in enumerate(ranked) for _ in range(9 - rank)]
        draw.shuffle(words)
        text = "".join(" ".join(words[at : at + 5]) + "\n" for at in range(0, len(words), 5))
        objective = (
            f"Write the three most frequent words of {path} to {out}, one a line, most frequent "
            "first."
        )
        expected = "".join(f"{word}\n" for word in ranked[:3])
        commands = (
            f"tr ' ' '\\n' < {path} | sort | uniq -c | sort -rn | head -3"
            f" | awk '{{print $2}}' > {out}",
        )
    else:
        groups = draw.sample(NOUNS, 4)
        rows = [(draw.choice(groups), draw.randint(1, 99)) for _ in range(20)]
        text = "".join(f"{group} {value}\n" for group, value in rows)
        sums: defaultdict[str, int] = defaultdict(int)
        for group, value in rows:
            sums[group] += value
        objective = (
            f"Each line of {path} has a word and a number. Write to {out} one line for every word: "
            "the word and the total of its numbers, in alphabetical order."
        )
        expected = "".join(f"{group} {sums[group]}\n" for group in sorted(sums))
        commands = (
            f"awk '{{s[$1]+=$2}} END {{for (k in s) print k, s[k]}}' {path} | sort > {out}",
        )
    return Scene(
        objective=objective,
        files={path: text},
        commands=commands,
        goals=(holds(out, expected),),
        gates=(unharmed({path: text}, out),),
    )


def tables(draw: Draw, level: int) -> Scene:
    """Comma-separated tables: one column, matching rows, a join of two tables."""
    source, out = (f"{name}.csv" for name in names(draw, 2))
    columns = ["id", *draw.sample(("item", "city", "price", "owner", "stock"), 3)]
    cities = draw.sample(NOUNS, 3)
    rows = [[str(100 + i), draw.choice(cities), *names(draw, 2)] for i in range(12)]
    text = "".join(",".join(row) + "\n" for row in [columns, *rows])
    files = {source: text}
    if level == 0:
        column = draw.randint(2, 4)
        objective = f"Write column {column} of {source}, header included, to {out}."
        expected = "".join(f"{row[column - 1]}\n" for row in [columns, *rows])
        commands = (f"cut -d, -f{column} {source} > {out}",)
    elif level == 1:
        city = rows[draw.randrange(len(rows))][1]
        objective = (
            f"Copy the header of {source} and the rows whose {columns[1]} is {city} to {out}."
        )
        kept = [columns, *(row for row in rows if row[1] == city)]
        expected = "".join(",".join(row) + "\n" for row in kept)
        commands = (f"awk -F, 'NR==1 || $2==\"{city}\"' {source} > {out}",)
    else:
        notes = {row[0]: f"{draw.choice(NOUNS)}{draw.randint(10, 99)}" for row in rows}
        picked = draw.sample(sorted(notes), 7)
        files["extra.csv"] = "id,note\n" + "".join(f"{one},{notes[one]}\n" for one in picked)
        objective = (
            f"{source} and extra.csv share the column id. Write {out}: a header, and for every row "
            f"of {source} whose id is also in extra.csv, that row with the note added as last "
            f"column, in the order of {source}."
        )
        kept = [[*columns, "note"], *([*row, notes[row[0]]] for row in rows if row[0] in picked)]
        expected = "".join(",".join(row) + "\n" for row in kept)
        commands = (
            "awk -F, 'NR==FNR {n[$1]=$2; next} $1 in n {print $0 \",\" n[$1]}' "
            f"extra.csv {source} > {out}",
        )
    return Scene(
        objective=objective,
        files=files,
        commands=commands,
        goals=(holds(out, expected),),
        gates=(unharmed(files, out),),
    )


def records(draw: Draw, level: int) -> Scene:
    """JSON: lay it out, change a nested value, merge a folder of records."""
    stems = names(draw, 5)
    source, out = f"{stems[0]}.json", f"{stems[1]}.json"
    value: dict[str, Json] = {name: draw.randint(100, 999) for name in stems[2:]}
    files = {source: json.dumps(value) + "\n"}
    if level == 0:
        objective = f"{source} is on one line. Write it, indented by 4 spaces, to {out}."
        goals = [holds(out, json.dumps(value, indent=4) + "\n")]
        commands: tuple[str, ...] = (f"python3 -m json.tool {source} {out}",)
        touched = [out]
    elif level == 1:
        outer, key, new = stems[3], stems[2], draw.randint(100, 999)
        value[outer] = {key: 0, "tags": draw.sample(NOUNS, 2)}
        files[source] = json.dumps(value) + "\n"
        objective = f"In {source}, set {key} inside {outer} to {new}. Keep the rest as it is."
        goals = [is_json(source, {**value, outer: {**value[outer], key: new}})]
        change = f"d=json.load(open('{source}')); d['{outer}']['{key}']={new}"
        commands = (
            f"cat {source}",
            f"python3 -c \"import json; {change}; json.dump(d, open('{source}', 'w'))\"",
        )
        touched = [source]
    else:
        folder = draw.choice(FOLDERS)
        listed = [{"name": stem, "size": draw.randint(1, 999)} for stem in stems[1:]]
        files = {f"{folder}/{one['name']}.json": json.dumps(one) + "\n" for one in listed}
        objective = (
            f"Each .json file in {folder} holds one record. Write all.json: a list of these "
            "records, smallest size first, equal sizes by name."
        )
        ordered = sorted(listed, key=lambda one: (one["size"], one["name"]))
        goals = [is_json("all.json", ordered)]
        load = f"r=[json.load(open(p)) for p in glob.glob('{folder}/*.json')]"
        order = "r.sort(key=lambda o: (o['size'], o['name']))"
        commands = (
            f'python3 -c "import json, glob; {load}; {order}; '
            "json.dump(r, open('all.json', 'w'))\"",
        )
        touched = ["all.json"]
    return Scene(
        objective=objective,
        files=files,
        commands=commands,
        goals=tuple(goals),
        gates=(unharmed(files, *touched),),
    )


_SQL = """import sqlite3, sys
connection = sqlite3.connect(sys.argv[1])
for row in connection.execute(sys.argv[2]):
    print(*row, sep="|")
connection.commit()
"""


def database(draw: Draw, level: int) -> Scene:
    """SQLite through a small script: delete a row, raise prices, fill a table from a join."""
    stem = draw.choice(NOUNS)
    base, table = f"{stem}.db", draw.choice(("items", "goods", "parts", "tools"))
    rows: list[list[Json]] = [
        [number, name, draw.randint(10, 400)]
        for number, name in zip(range(1, 9), names(draw, 8), strict=True)
    ]
    start = [f"CREATE TABLE {table} (id INTEGER, name TEXT, price INTEGER)"]
    start += [f"INSERT INTO {table} VALUES ({i}, '{n}', {p})" for i, n, p in rows]
    whole = f"SELECT id, name, price FROM {table} ORDER BY id"
    gates = []
    if level == 0:
        number = draw.randint(1, 8)
        objective = f"Delete the row with id {number} from {table}."
        statement = f"DELETE FROM {table} WHERE id={number}"
        goals = [selects(base, whole, [row for row in rows if row[0] != number])]
    elif level == 1:
        limit, more = draw.choice((100, 150, 200, 250)), draw.randint(5, 50)
        rows[0][2], rows[1][2] = limit - 1, limit
        start[1:3] = [f"INSERT INTO {table} VALUES ({i}, '{n}', {p})" for i, n, p in rows[:2]]
        objective = f"In {table}, add {more} to every price below {limit}."
        statement = f"UPDATE {table} SET price=price+{more} WHERE price<{limit}"
        raised = [[i, n, p + more if p < limit else p] for i, n, p in rows]
        goals = [selects(base, whole, raised)]
    else:
        sales = [(draw.randint(1, 8), draw.randint(1, 9)) for _ in range(15)]
        start += ["CREATE TABLE sales (item INTEGER, pieces INTEGER)"]
        start += [f"INSERT INTO sales VALUES ({item}, {pieces})" for item, pieces in sales]
        sold: Counter[int] = Counter()
        for item, pieces in sales:
            sold[item] += pieces
        objective = (
            f"Make a table report (name, pieces): for each row of {table} that was sold, its name "
            "and the sum of its pieces in the table sales (sales.item is its id)."
        )
        statement = (
            f"CREATE TABLE report AS SELECT name, sum(pieces) AS pieces FROM {table} "
            f"JOIN sales ON sales.item={table}.id GROUP BY {table}.id"
        )
        expected = sorted([row[1], sold[row[0]]] for row in rows if sold[row[0]])
        goals = [selects(base, "SELECT name, pieces FROM report ORDER BY name", expected)]
        gates = [selects(base, whole, rows, gate=True)]
    files = {"sql.py": _SQL, "start.sql": ";\n".join(start) + ";\n", "note.txt": prose(draw, 1)}
    build = f"import sqlite3; sqlite3.connect('{base}').executescript(open('start.sql').read())"
    look = f"python3 sql.py {base} 'SELECT * FROM {table}'"
    change = f"python3 sql.py {base} '{statement}'"
    return Scene(
        objective=f"{objective} Use: python3 sql.py {base} 'STATEMENT'",
        files=files,
        commands=(change,) if level == 0 else (look, change),
        goals=tuple(goals),
        gates=(*gates, unharmed({p: t for p, t in files.items() if p != "start.sql"}, base)),
        setup=(f'python3 -c "{build}"', "rm start.sql"),
    )
