//! Markdown as it comes, a piece at a time, in the styles that terminals have.
//!
//! What a piece adds is shown as soon as it is known how: text at once, what may be a mark once what follows it tells.
//! So a phrase in bold is shown when it is whole, and an asterisk that begins nothing is shown as it is. However a text
//! is cut, the same is shown.

/// The look of some text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Style {
    /// Headings, and what stands between `**`.
    pub bold: bool,
    /// What stands between `*` or `_`.
    pub italic: bool,
    /// Code, in a line or in lines of its own.
    pub code: bool,
    /// Marks that are shown though they are no text: fences, quotes, rules.
    pub dim: bool,
}

impl Style {
    /// What asks a terminal for it; nothing for text as usual.
    #[must_use]
    pub fn codes(self) -> String {
        let wanted = [
            (self.bold, "1"),
            (self.dim, "2"),
            (self.italic, "3"),
            (self.code, "36"),
        ];
        let codes: Vec<&str> = wanted
            .iter()
            .filter(|(is, _)| *is)
            .map(|(_, code)| *code)
            .collect();
        match codes.is_empty() {
            true => String::new(),
            false => format!("\u{1b}[{}m", codes.join(";")),
        }
    }
}

/// Text of one look.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Styled {
    /// What is shown.
    pub text: String,
    /// How.
    pub style: Style,
}

/// Where in a line the text is.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
enum Place {
    /// Nothing of it but white space and marks of quotes was shown.
    #[default]
    Begins,
    /// After what its beginning meant.
    Within(Style),
}

/// Markdown of which a part has come.
#[derive(Debug, Clone, Default)]
pub struct Markdown {
    /// What is not shown yet.
    held: String,
    place: Place,
    /// The mark that ends the lines of code, within some.
    fence: Option<String>,
    /// The character before what is held.
    before: char,
}

/// Characters after which a mark that nothing has closed is none, so that not a whole line is held back for it.
const FARTHEST_CLOSE: usize = 400;

impl Markdown {
    /// Takes up more of the text, and returns what can be shown now.
    pub fn push(&mut self, text: &str) -> Vec<Styled> {
        self.held.push_str(text);
        let mut shown = Shown::default();
        while let Some(end) = self.held.find('\n') {
            let line: String = self.held.drain(..=end).collect();
            self.line(&line[..end], true, &mut shown);
            shown.add("\n", Style::default());
            (self.place, self.before) = (Place::Begins, ' ');
        }
        let line = std::mem::take(&mut self.held);
        let left = self.line(&line, false, &mut shown);
        self.held = line[left..].to_owned();
        shown.0
    }

    /// What is left to show at the end of the text.
    pub fn finish(&mut self) -> Vec<Styled> {
        let mut shown = Shown::default();
        let line = std::mem::take(&mut self.held);
        self.line(&line, true, &mut shown);
        *self = Self::default();
        shown.0
    }

    /// Shows what can be shown of the rest of a line, which is `whole` or may go on. Returns where what it could not
    /// show begins.
    fn line(&mut self, line: &str, whole: bool, shown: &mut Shown) -> usize {
        let mut at = 0;
        while self.place == Place::Begins {
            let rest = &line[at..];
            match self.beginning(rest, whole) {
                Beginning::Unknown => return at,
                Beginning::Shown(length, as_what, style) => {
                    shown.add(&as_what, style);
                    at += length;
                    if at == line.len() && whole {
                        return at;
                    }
                }
                Beginning::Text(length, as_what, style) => {
                    shown.add(&as_what, style);
                    at += length;
                    self.place = Place::Within(style);
                }
            }
        }
        let Place::Within(style) = self.place else {
            return at;
        };
        if style.code {
            // Within a fence, where nothing is marked.
            shown.add(&line[at..], style);
            return line.len();
        }
        at + phrases(&line[at..], whole, style, &mut self.before, shown)
    }

    /// What the beginning of a line means.
    fn beginning(&mut self, line: &str, whole: bool) -> Beginning {
        let dim = Style {
            dim: true,
            ..Style::default()
        };
        let code = Style {
            code: true,
            ..Style::default()
        };
        let bare = line.trim_start_matches(' ');
        let indent = line.len() - bare.len();
        if let Some(fence) = &self.fence {
            let mark = bare.trim_end();
            let closes = mark.starts_with(fence.as_str()) && is_run(mark);
            if !whole
                && (is_run(mark) || mark.is_empty())
                && fence.starts_with(mark.get(..1).unwrap_or(""))
            {
                return Beginning::Unknown;
            }
            if closes {
                self.fence = None;
                return Beginning::Shown(line.len(), line.to_owned(), dim);
            }
            return Beginning::Text(0, String::new(), code);
        }
        let usual = Style::default();
        let Some(first) = bare.chars().next() else {
            return match whole {
                true => Beginning::Text(line.len(), line.to_owned(), usual),
                false => Beginning::Unknown,
            };
        };
        let run = bare.len() - bare.trim_start_matches(first).len();
        let after = &bare[run..];
        let spaces = &line[..indent];
        match first {
            // A run that the line may go on with.
            '#' | '-' | '*' | '_' | '+' | '`' | '~' | '>' if after.is_empty() && !whole => {
                Beginning::Unknown
            }
            '`' | '~' if run >= 3 => {
                if !whole {
                    return Beginning::Unknown;
                }
                if first == '`' && after.contains('`') {
                    return Beginning::Text(indent, spaces.to_owned(), usual);
                }
                self.fence = Some(bare[..run].to_owned());
                Beginning::Shown(line.len(), line.to_owned(), dim)
            }
            '-' | '*' | '_' if run >= 3 && after.trim_end().is_empty() => match whole {
                true => Beginning::Shown(line.len(), "─".repeat(24), dim),
                false => Beginning::Unknown,
            },
            '#' if run <= 6 && after.starts_with(' ') => {
                let heading = Style {
                    bold: true,
                    ..usual
                };
                Beginning::Text(indent + run + 1, String::new(), heading)
            }
            '-' | '*' | '+' if run == 1 && after.starts_with(' ') => {
                Beginning::Text(indent + 2, format!("{spaces}• "), usual)
            }
            '>' => Beginning::Shown(indent + 1, format!("{spaces}│"), dim),
            _ => Beginning::Text(indent, spaces.to_owned(), usual),
        }
    }
}

/// What the beginning of a line means, of which so many bytes are done with and shown as this.
enum Beginning {
    /// What follows tells.
    Unknown,
    /// And what follows is a beginning, too.
    Shown(usize, String, Style),
    /// And what follows is text.
    Text(usize, String, Style),
}

/// Whether all characters are the same.
fn is_run(text: &str) -> bool {
    let mut characters = text.chars();
    characters
        .next()
        .is_some_and(|first| characters.all(|c| c == first))
}

#[derive(Default)]
struct Shown(Vec<Styled>);

impl Shown {
    fn add(&mut self, text: &str, style: Style) {
        match self.0.last_mut() {
            _ if text.is_empty() => {}
            Some(last) if last.style == style => last.text.push_str(text),
            _ => self.0.push(Styled {
                text: text.to_owned(),
                style,
            }),
        }
    }
}

/// Shows what can be shown of text within a line. Returns where what could not be shown begins.
fn phrases(text: &str, whole: bool, style: Style, before: &mut char, shown: &mut Shown) -> usize {
    let mut at = 0;
    while let Some(next) = text[at..]
        .find(['*', '_', '`', '\\'])
        .map(|offset| at + offset)
    {
        shown.add(&text[at..next], style);
        *before = text[..next].chars().next_back().unwrap_or(*before);
        at = match phrase(&text[next..], *before, whole) {
            Phrase::Unknown => return next,
            Phrase::Plain(length) => {
                shown.add(&text[next..next + length], style);
                next + length
            }
            Phrase::Escaped(length) => {
                shown.add(&text[next + 1..next + length], style);
                next + length
            }
            Phrase::Code { inner, length } => {
                let code = &text[next + inner.start..next + inner.end];
                shown.add(
                    code,
                    Style {
                        code: true,
                        ..style
                    },
                );
                next + length
            }
            Phrase::Emphasis {
                inner,
                length,
                mark,
            } => {
                let style = Style {
                    bold: style.bold || mark >= 2,
                    italic: style.italic || mark != 2,
                    ..style
                };
                phrases(
                    &text[next + inner.start..next + inner.end],
                    true,
                    style,
                    &mut ' ',
                    shown,
                );
                next + length
            }
        };
        *before = text[..at].chars().next_back().unwrap_or(*before);
    }
    shown.add(&text[at..], style);
    *before = text.chars().next_back().unwrap_or(*before);
    text.len()
}

/// What begins with a mark: how many bytes it has, and which of them are shown.
enum Phrase {
    Unknown,
    Plain(usize),
    Escaped(usize),
    Code {
        inner: std::ops::Range<usize>,
        length: usize,
    },
    Emphasis {
        inner: std::ops::Range<usize>,
        length: usize,
        mark: usize,
    },
}

/// What `text` begins with, whose first character is a mark that stands after `before`.
fn phrase(text: &str, before: char, whole: bool) -> Phrase {
    let first = text.chars().next().unwrap_or(' ');
    if first == '\\' {
        return match text[1..].chars().next() {
            Some(escaped) if escaped.is_ascii_punctuation() => Phrase::Escaped(2),
            None if !whole => Phrase::Unknown,
            _ => Phrase::Plain(1),
        };
    }
    let run = text.len() - text.trim_start_matches(first).len();
    // What follows tells whether the run goes on, and whether it begins anything.
    let Some(after) = text[run..].chars().next() else {
        return if whole {
            Phrase::Plain(run)
        } else {
            Phrase::Unknown
        };
    };
    let opens = match first {
        '`' => true,
        '_' => run <= 3 && !after.is_whitespace() && !before.is_alphanumeric(),
        _ => run <= 3 && !after.is_whitespace(),
    };
    if !opens {
        return Phrase::Plain(run);
    }
    let limit = text[run..].char_indices().nth(FARTHEST_CLOSE);
    let near = limit.map_or(text, |(end, _)| &text[..run + end]);
    let is_last_word = whole || limit.is_some();
    match close(near, first, run, is_last_word) {
        Some(end) => {
            let (inner, length) = (run..end, end + run);
            match first {
                '`' => Phrase::Code { inner, length },
                _ => Phrase::Emphasis {
                    inner,
                    length,
                    mark: run,
                },
            }
        }
        None if is_last_word => Phrase::Plain(run),
        None => Phrase::Unknown,
    }
}

/// Where the run of marks begins that closes the one at the beginning of `text`. A run at the end of a text that is not
/// whole may go on.
fn close(text: &str, mark: char, run: usize, whole: bool) -> Option<usize> {
    let mut at = run;
    while let Some(found) = text[at..].find(mark).map(|offset| at + offset) {
        let rest = &text[found..];
        let length = rest.len() - rest.trim_start_matches(mark).len();
        let after = text[found + length..].chars().next();
        let before = text[..found].chars().next_back().unwrap_or(' ');
        let is_open_end = after.is_none() && !whole;
        let closes = match mark {
            '`' => true,
            _ if before.is_whitespace() || before == '\\' => false,
            '_' => !after.is_some_and(char::is_alphanumeric),
            _ => true,
        };
        if length == run && closes && !is_open_end {
            return Some(found);
        }
        at = found + length;
    }
    None
}

#[cfg(test)]
mod tests;
