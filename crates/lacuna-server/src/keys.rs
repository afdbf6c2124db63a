//! Keys that open the server.

use std::fmt;

use subtle::{Choice, ConditionallySelectable, ConstantTimeEq};

/// Bytes of the shortest key that is accepted: what is shorter can be guessed over the network.
const SHORTEST: usize = 8;

/// Keys that open the server. Never printed.
#[derive(Clone, Default)]
pub struct ApiKeys {
    keys: Vec<String>,
    open_to_all: bool,
}

/// Text that cannot be a key.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum KeyProblem {
    /// There is none.
    #[error("the API key is empty")]
    Empty,
    /// It could be guessed.
    #[error("the API key has {bytes} bytes, and needs {SHORTEST} at least")]
    Short {
        /// Bytes it has.
        bytes: usize,
    },
    /// It could not be sent in a header as it is, or is two.
    #[error("the API key has spaces in it, or characters other than those of printable ASCII")]
    Characters,
}

/// A line of a key file that is neither a key, nor a comment, nor blank.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {problem}")]
pub struct KeyFileError {
    /// The line, counted from 1.
    pub line: usize,
    /// What is wrong with it.
    pub problem: KeyProblem,
}

impl ApiKeys {
    /// No keys, for whoever reaches the address, by whatever name: others decide who that is.
    #[must_use]
    pub fn open_to_all() -> Self {
        Self {
            keys: Vec::new(),
            open_to_all: true,
        }
    }

    fn of(keys: Vec<String>) -> Self {
        Self {
            keys,
            open_to_all: false,
        }
    }

    /// These keys; space around them is not part of them.
    ///
    /// # Errors
    /// [`KeyProblem`] of the first that cannot be one.
    pub fn new<'a>(keys: impl IntoIterator<Item = &'a str>) -> Result<Self, KeyProblem> {
        let keys = keys.into_iter().map(checked);
        keys.collect::<Result<_, _>>().map(Self::of)
    }

    /// The keys in a file of this text: one to a line, apart from blank lines and those that begin
    /// with `#`.
    ///
    /// # Errors
    /// [`KeyFileError`] of the first line that is something else.
    pub fn from_lines(text: &str) -> Result<Self, KeyFileError> {
        let lines = text.lines().enumerate();
        let keys =
            lines.filter(|(_, line)| !matches!(line.trim().chars().next(), None | Some('#')));
        let checked = keys.map(|(index, line)| {
            let line_number = index + 1;
            checked(line).map_err(|problem| KeyFileError {
                line: line_number,
                problem,
            })
        });
        checked.collect::<Result<_, _>>().map(Self::of)
    }

    /// Adds those of `others`.
    pub fn extend(&mut self, others: Self) {
        self.keys.extend(others.keys);
    }

    /// Whether anybody else than this machine's programs may do without a key.
    pub(crate) fn is_open_to_all(&self) -> bool {
        self.keys.is_empty() && self.open_to_all
    }

    /// Whether no key is asked for.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &str> {
        self.keys.iter().map(String::as_str)
    }

    /// Which of the keys `presented` is, if any. The time it takes depends on lengths alone.
    pub(crate) fn find(&self, presented: &str) -> Option<u32> {
        let mut found = Choice::from(0);
        let mut number = 0;
        for (index, key) in (0..).zip(&self.keys) {
            let same = key.as_bytes().ct_eq(presented.as_bytes());
            found |= same;
            number.conditional_assign(&index, same);
        }
        bool::from(found).then_some(number)
    }
}

fn checked(key: &str) -> Result<String, KeyProblem> {
    let key = key.trim();
    match key.len() {
        0 => Err(KeyProblem::Empty),
        _ if !key.bytes().all(|byte| byte.is_ascii_graphic()) => Err(KeyProblem::Characters),
        bytes if bytes < SHORTEST => Err(KeyProblem::Short { bytes }),
        _ => Ok(key.to_owned()),
    }
}

impl fmt::Debug for ApiKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ApiKeys({})", self.keys.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_of_the_keys_opens_and_nothing_else() {
        let keys = ApiKeys::new(["first-key", " second-key\n"]).expect("keys");
        assert_eq!(keys.find("first-key"), Some(0));
        assert_eq!(keys.find("second-key"), Some(1));
        for other in ["", "first-ke", "first-keyy", "FIRST-KEY"] {
            assert_eq!(keys.find(other), None, "{other}");
        }
        assert_eq!(format!("{keys:?}"), "ApiKeys(2)");
    }

    #[test]
    fn comments_and_blank_lines_of_a_key_file_are_no_keys() {
        let text = "# for the router\nfirst-key\n\n   \n  # second-key\r\n  third-key\r\n";
        let keys = ApiKeys::from_lines(text).expect("keys");
        assert_eq!(format!("{keys:?}"), "ApiKeys(2)");
        assert_eq!(keys.find("first-key"), Some(0));
        assert_eq!(keys.find("third-key"), Some(1));
        for comment in ["# for the router", "#", "# second-key", "second-key"] {
            assert_eq!(keys.find(comment), None, "{comment}");
        }
        let none = ApiKeys::from_lines("# nothing yet\n").expect("no keys");
        assert!(none.is_empty());
    }

    #[test]
    fn a_line_that_cannot_be_a_key_is_named_and_not_shown() {
        for (text, line, problem) in [
            ("first-key\nsecond-key # old\n", 2, KeyProblem::Characters),
            ("\n\nsecret\n", 3, KeyProblem::Short { bytes: 6 }),
            ("caf\u{e9}-au-lait", 1, KeyProblem::Characters),
            ("\u{feff}first-key", 1, KeyProblem::Characters),
        ] {
            let error = ApiKeys::from_lines(text).expect_err(text);
            assert_eq!(error, KeyFileError { line, problem });
            let said = error.to_string();
            assert!(
                !said.contains("secret") && !said.contains("second"),
                "{said}"
            );
        }
        assert_eq!(ApiKeys::new(["  "]).unwrap_err(), KeyProblem::Empty);
    }
}
