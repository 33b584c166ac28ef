"""Terminal kinds about files and trees: edit, move, clean up, permissions, archives, checksums.

Each function is one kind and one template; levels go from one short command to several. The one
thing that must stay true: its `commands`, run in a workspace with its files, meet its goals and
its gates.
"""

from __future__ import annotations

import hashlib

from posttrain.domains.families.terminal_scene import (
    FOLDERS,
    Draw,
    Scene,
    gone,
    has_mode,
    holds,
    names,
    prose,
    unharmed,
)


def edit(draw: Draw, level: int) -> Scene:
    """Find a setting and change it: in a named file, in one of several, in all of a suffix."""
    keys = ("port", "limit", "width", "depth", "speed", "delay")
    key = draw.choice(keys)
    old, new = draw.sample(range(100, 1000), 2)
    stems = names(draw, (1, 6, 8)[level])
    folder = draw.choice(FOLDERS)

    def text(name: str, value: int) -> str:
        return f"name={name}\n{key}={value}\nmode={draw.choice(('on', 'off'))}\n"

    if level == 0:
        files = {f"{stems[0]}.cfg": text(stems[0], old)}
        touched = list(files)
        objective = f"Set {key} to {new} in {touched[0]}."
        commands: tuple[str, ...] = (f"sed -i s/{key}=.*/{key}={new}/ {touched[0]}",)
    elif level == 1:
        files = {f"{folder}/{one}.cfg": f"name={one}\nmode=on\n" for one in stems}
        touched = [f"{folder}/{stems[draw.randrange(len(stems))]}.cfg"]
        files[touched[0]] = text("main", old)
        objective = f"Exactly one file below {folder} sets {key}. Set it to {new} there."
        commands = (
            f"grep -rl {key}= {folder}",
            f"sed -i s/{key}=.*/{key}={new}/ {touched[0]}",
        )
    else:
        suffixes = ["ini", "bak"] * (len(stems) // 2)
        files = {
            f"{folder}/{one[0]}/{one}.{suffix}": text(one, draw.choice((old, old + 1)))
            for one, suffix in zip(stems, suffixes, strict=True)
        }
        files[f"{folder}/{stems[0][0]}/{stems[0]}.ini"] = text(stems[0], old)
        touched = [p for p, t in files.items() if p.endswith(".ini") and f"{key}={old}\n" in t]
        objective = (
            f"In every .ini file below {folder}, at any depth, replace {key}={old} by {key}={new}."
        )
        commands = (
            f"find {folder} -name '*.ini' -exec sed -i 's/^{key}={old}$/{key}={new}/' {{}} +",
        )
    goals = tuple(holds(p, files[p].replace(f"{key}={old}\n", f"{key}={new}\n")) for p in touched)
    gates = (unharmed(files, *touched),)
    return Scene(objective=objective, files=files, commands=commands, goals=goals, gates=gates)


def move(draw: Draw, level: int) -> Scene:
    """Rename and move: one file, all of a suffix into a folder, a suffix throughout a tree."""
    stems = names(draw, (2, 6, 7)[level])
    folder = draw.choice(FOLDERS)
    if level == 0:
        old, new = (f"{stem}.txt" for stem in stems)
        files = {old: prose(draw)}
        moved = {old: new}
        objective = f"Rename {old} to {new}."
        commands: tuple[str, ...] = (f"mv {old} {new}",)
    elif level == 1:
        files = {f"{s}.{draw.choice(('txt', 'csv'))}": prose(draw) for s in stems[2:]}
        files |= {f"{stem}.log": prose(draw) for stem in stems[:2]}
        moved = {path: f"{folder}/{path}" for path in files if path.endswith(".log")}
        objective = f"Make a folder {folder} and move every .log file into it."
        commands = (f"mkdir {folder}", f"mv *.log {folder}")
    else:
        suffix = {s: "jpeg" if i < 4 else "png" for i, s in enumerate(stems)}
        files = {f"{folder}/{s[0]}/{s}.{suffix[s]}": prose(draw, 1) for s in stems}
        moved = {p: p[: -len("jpeg")] + "jpg" for p in files if p.endswith(".jpeg")}
        objective = (
            f"Rename every .jpeg file below {folder}, at any depth, so that it ends in .jpg."
        )
        loop = 'for f in $(find . -name "*.jpeg"); do mv $f ${f%.jpeg}.jpg; done'
        commands = (loop,)
    goals = tuple(holds(new, files[old], normalise="exact") for old, new in moved.items())
    gates = (*(gone(old, gate=True) for old in moved), unharmed(files, *moved, *moved.values()))
    return Scene(objective=objective, files=files, commands=commands, goals=goals, gates=gates)


def cleanup(draw: Draw, level: int) -> Scene:
    """Delete what is not wanted and nothing else: by name, by emptiness, by equal content."""
    stems = names(draw, 6)
    folder = draw.choice(FOLDERS)
    paths = [f"{folder}/{stem}" for stem in stems]
    if level == 0:
        suffixes = ["tmp", "tmp", "txt", "txt", "md", "csv"]
        files = {f"{p}.{s}": prose(draw, 1) for p, s in zip(paths, suffixes, strict=True)}
        doomed = [path for path in files if path.endswith(".tmp")]
        objective = f"Delete the .tmp files in {folder}."
        commands: tuple[str, ...] = (f"rm {folder}/*.tmp",)
    elif level == 1:
        files = {f"{p[:-2]}/{p[-2:]}.txt": prose(draw, 1) for p in paths}
        doomed = sorted(draw.sample(sorted(files), 2))
        files |= dict.fromkeys(doomed, "")
        objective = f"Delete every empty file below {folder}, at any depth. Keep all others."
        commands = (f"find {folder} -type f -empty -delete",)
    else:
        files = {f"{p}.txt": prose(draw, 2) for p in paths}
        ordered = sorted(files)
        kept, doomed = ordered[draw.randrange(2)], [ordered[3], ordered[5]]
        files |= dict.fromkeys(doomed, files[kept])
        objective = (
            f"Some files in {folder} have the same content. Of each set of equal files keep the "
            "one whose name comes first in the alphabet and delete the others."
        )
        commands = (f"md5sum {folder}/* | sort", f"rm {doomed[0]} {doomed[1]}")
    goals = tuple(gone(path) for path in doomed)
    gates = (unharmed(files, *doomed),)
    return Scene(objective=objective, files=files, commands=commands, goals=goals, gates=gates)


def permissions(draw: Draw, level: int) -> Scene:
    """Modes: set one; set the one that a file names; list the open files and close them."""
    stems = names(draw, (1, 2, 6)[level])
    folder = draw.choice(FOLDERS)
    goals = []
    if level < 2:
        path = f"{stems[0]}.sh"
        mode = draw.choice(("700", "710", "740", "744", "750", "754", "755", "500", "550", "555"))
        files = {path: f"echo {stems[0]}\n"}
        modes, wanted = {path: "600"}, {path: mode}
        commands: tuple[str, ...] = (f"chmod {mode} {path}",)
        if level == 0:
            objective = f"Give {path} the permissions {mode}."
        else:
            note = f"{stems[1]}.txt"
            files[note], modes[note] = f"{mode}\n", "644"
            objective = f"Give {path} the permissions that {note} names."
            commands = (f"cat {note}", *commands)
    else:
        files = {f"{folder}/{stem[0]}/{stem}": prose(draw, 1) for stem in stems}
        modes = {path: draw.choice(("644", "600")) for path in files}
        wanted = dict.fromkeys(sorted(draw.sample(sorted(files), 2)), "640")
        modes |= dict.fromkeys(wanted, "666")
        objective = (
            f"Below {folder}, list the files that everybody may write to, one path a line, in "
            "open.txt, and then set the permissions of each of them to 640."
        )
        commands = (
            f"find {folder} -type f -perm -o=w > open.txt; cat open.txt",
            "chmod 640 $(cat open.txt)",
        )
        goals = [holds("open.txt", "".join(f"{p}\n" for p in wanted), normalise="sorted_lines")]
    goals += [has_mode(path, mode) for path, mode in wanted.items()]
    gates = [has_mode(path, modes[path], gate=True) for path in files if path not in wanted]
    gates.append(unharmed(files, *(["open.txt"] if level == 2 else [])))
    return Scene(
        objective=objective,
        files=files,
        commands=commands,
        goals=tuple(goals),
        gates=tuple(gates),
        setup=tuple(f"chmod {mode} {path}" for path, mode in modes.items()),
        constraints=("Change no file's content and no other file's permissions.",),
    )


def archive(draw: Draw, level: int) -> Scene:
    """Unpack: a whole archive, one member of it, a file from an archive within an archive."""
    stems = names(draw, 4)
    pack, folder = f"{stems[0]}.tar.gz", draw.choice(FOLDERS)
    if level == 0:
        files = {f"{stem}.txt": prose(draw) for stem in stems[1:3]}
        out = {path: path for path in files}
        objective = f"Unpack {pack} here."
        commands: tuple[str, ...] = (f"tar xf {pack}",)
        setup: tuple[str, ...] = (f"tar czf {pack} *.txt", "rm *.txt")
    elif level == 1:
        files = {f"{folder}/{stem}.txt": prose(draw) for stem in stems[1:]}
        member = f"{folder}/{stems[2]}.txt"
        out = {member: member}
        objective = f"From {pack} extract the file {member}, and no other file."
        commands = (f"tar tf {pack}", f"tar xf {pack} {member}")
        setup = (f"tar czf {pack} {folder}", f"rm -r {folder}")
    else:
        files = {f"{stem}.txt": prose(draw) for stem in stems[1:]}
        member, inner = f"{stems[3]}.txt", f"{stems[1]}.tar"
        out = {member: f"{folder}/{member}"}
        objective = (
            f"{pack} holds another archive, and that one holds {member}. Put {member} into a new "
            f"folder {folder}. Leave neither the inner archive nor any other file behind."
        )
        commands = (
            f"tar tf {pack}",
            f"mkdir {folder}; tar xOf {pack} {inner} | tar xf - -C {folder} {member}",
        )
        setup = (f"tar cf {inner} *.txt", "rm *.txt", f"tar czf {pack} {inner}", f"rm {inner}")
    goals = tuple(holds(new, files[old], normalise="exact") for old, new in out.items())
    return Scene(
        objective=objective,
        files=files,
        commands=commands,
        goals=goals,
        gates=(has_mode(pack, "644", gate=True), unharmed({}, pack, *out.values())),
        setup=(*setup, f"chmod 644 {pack}"),
        constraints=(f"Keep {pack}.",),
    )


def checksum(draw: Draw, level: int) -> Scene:
    """Hashes: of one file, the file that does not match a list, a list without the bad lines."""
    stems = names(draw, (1, 5, 6)[level])
    files = {f"{stem}.txt": prose(draw) for stem in stems}
    hashes = {path: hashlib.sha256(text.encode()).hexdigest() for path, text in files.items()}
    if level == 0:
        path = f"{stems[0]}.txt"
        objective = f"Write the SHA-256 checksum line of {path} into {stems[0]}.sum."
        out, expected = f"{stems[0]}.sum", f"{hashes[path]}  {path}\n"
        commands: tuple[str, ...] = (f"sha256sum {path} > {out}",)
    else:
        out = "bad.txt" if level == 1 else "good.txt"
        bad = sorted(draw.sample(sorted(files), level))
        listed = {p: hashlib.sha256(prose(draw).encode()).hexdigest() for p in bad}
        lines = {path: f"{listed.get(path, hashes[path])}  {path}\n" for path in files}
        files["SHA256SUMS"] = "".join(lines.values())
        if level == 1:
            objective = "One file does not match its line in SHA256SUMS. Write its name to bad.txt."
            expected = f"{bad[0]}\n"
            commands = ("sha256sum -c SHA256SUMS", f"echo {bad[0]} > bad.txt")
        else:
            objective = (
                "Some files do not match SHA256SUMS. Write good.txt: the lines of SHA256SUMS whose "
                "files match, in the same order."
            )
            expected = "".join(line for path, line in lines.items() if path not in bad)
            commands = (
                "sha256sum -c SHA256SUMS",
                f"grep -v -e ' {bad[0]}$' -e ' {bad[1]}$' SHA256SUMS > good.txt",
            )
    return Scene(
        objective=objective,
        files=files,
        commands=commands,
        goals=(holds(out, expected),),
        gates=(unharmed(files, out),),
    )
