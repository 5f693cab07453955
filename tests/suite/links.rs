//! Every link in every document leads somewhere: to a file, and to a heading in it.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Component, Path, PathBuf},
};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Every Markdown file of the repository, by its path in it.
fn documents() -> BTreeMap<PathBuf, String> {
    fn walk(folder: &Path, found: &mut BTreeMap<PathBuf, String>) {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            if path.is_dir() {
                if !["target", "node_modules", ".git", "gen", "dist", "data"]
                    .contains(&name.as_str())
                {
                    walk(&path, found);
                }
            } else if path.extension().is_some_and(|extension| extension == "md") {
                let text = fs::read_to_string(&path).unwrap();
                found.insert(path.strip_prefix(root()).unwrap().to_owned(), text);
            }
        }
    }
    let mut found = BTreeMap::new();
    walk(root(), &mut found);
    assert!(found.len() > 10, "the documents are not where this test looks");
    found
}

/// The lines outside of code blocks, with their numbers.
fn prose(text: &str) -> Vec<(usize, &str)> {
    let mut inside = false;
    let mut lines = Vec::new();
    for (number, line) in text.lines().enumerate() {
        if line.trim_start().starts_with("```") {
            inside = !inside;
        } else if !inside {
            lines.push((number + 1, line));
        }
    }
    lines
}

/// The targets of the links and of the pictures in a line, those in HTML too.
fn targets(line: &str) -> Vec<String> {
    // A link's text may be code; its target is none.
    [("](", ')'), (" src=\"", '"'), (" href=\"", '"')]
        .into_iter()
        .flat_map(|(begin, end)| line.split(begin).skip(1).map(move |rest| (rest, end)))
        .filter_map(|(rest, end)| rest.split_once(end))
        .map(|(target, _)| target.to_owned())
        .collect()
}

/// The anchors of a document, as GitHub makes them of its headings.
fn anchors(text: &str) -> BTreeSet<String> {
    let mut seen: BTreeMap<String, usize> = BTreeMap::new();
    let mut found = BTreeSet::new();
    for (_, line) in prose(text) {
        let heading = line.trim_start_matches('#');
        if heading.len() == line.len() || !heading.starts_with(' ') {
            continue;
        }
        // Of a link in a heading its text counts.
        let mut words = heading.trim().to_lowercase();
        while let (Some(begin), Some(end)) = (words.find("]("), words.find(')')) {
            if end < begin {
                break;
            }
            words.replace_range(begin..=end, "");
        }
        let slug: String = words
            .chars()
            .filter(|c| c.is_alphanumeric() || [' ', '-', '_'].contains(c))
            .map(|c| if c == ' ' { '-' } else { c })
            .collect();
        let nth = seen.entry(slug.clone()).or_default();
        found.insert(if *nth == 0 { slug } else { format!("{slug}-{nth}") });
        *nth += 1;
    }
    found
}

/// The path without `.` and `..`.
fn plain(path: &Path) -> PathBuf {
    let mut parts = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => {
                parts.pop();
            }
            Component::CurDir => {}
            Component::Prefix(_) | Component::RootDir | Component::Normal(_) => parts.push(part),
        }
    }
    parts
}

/// What is wrong with the links of these documents.
fn broken(documents: &BTreeMap<PathBuf, String>) -> Vec<String> {
    let mut found = Vec::new();
    for (document, text) in documents {
        for (number, line) in prose(text) {
            for target in targets(line) {
                let place = format!("{}:{number}: {target}", document.display());
                if target.contains("://") || target.starts_with("mailto:") {
                    continue;
                }
                let (file, anchor) = target.split_once('#').unwrap_or((&target, ""));
                let path = match file {
                    "" => document.clone(),
                    _ => plain(&document.parent().unwrap().join(file)),
                };
                if !documents.contains_key(&path) && !root().join(&path).exists() {
                    found.push(format!("{place}: there is no such file"));
                } else if !anchor.is_empty() {
                    match documents.get(&path).map(|text| anchors(text)) {
                        Some(anchors) if anchors.contains(anchor) => {}
                        Some(_) | None => found.push(format!("{place}: there is no such heading")),
                    }
                }
            }
        }
    }
    found
}

#[test]
fn every_link_leads_somewhere() {
    let documents = documents();
    let links: usize = documents
        .values()
        .map(|text| prose(text).iter().map(|(_, line)| targets(line).len()).sum::<usize>())
        .sum();
    assert!(links > 100, "found {links} links only");
    let broken = broken(&documents);
    assert!(broken.is_empty(), "{}", broken.join("\n"));
}

#[test]
fn a_link_to_nowhere_is_found() {
    let text = "# One\n## One\n[a](#one) [b](#one-1) [c](#two) [d](no.md)\n```\n[e](no.md)\n```\n[`f`](README.md#no)\n\
        <img alt=\"g\" src=\"images/no.png\"> <img src=\"images/dashboard-light.png\">";
    let mut documents = documents();
    documents.insert("docs/new.md".into(), text.to_owned());
    assert_eq!(
        broken(&documents),
        [
            "docs/new.md:3: #two: there is no such heading",
            "docs/new.md:3: no.md: there is no such file",
            "docs/new.md:7: README.md#no: there is no such heading",
            "docs/new.md:8: images/no.png: there is no such file",
        ]
    );
}

#[test]
fn every_document_of_the_folder_is_in_its_index() {
    let documents = documents();
    let index = &documents[Path::new("docs/README.md")];
    for document in documents.keys().filter(|document| document.starts_with("docs")) {
        let name = document.file_name().unwrap().to_string_lossy();
        let link = format!("]({name})");
        assert!(name == "README.md" || index.contains(&link), "docs/README.md has no {link}");
    }
}
