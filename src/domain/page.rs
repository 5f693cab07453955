//! Lists in pages: what is asked for, and the tokens that go on where a page ended.

use super::ActivityId;

/// A token that the list did not give.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("is not a token of this list")]
pub struct InvalidToken;

/// One page of a list by id.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PageQuery {
    /// At least 1.
    pub page_size: u32,
    /// Opaque; empty for the first page.
    pub page_token: String,
    /// Leaves out what is of any other activity.
    pub activity_id: Option<ActivityId>,
}

impl PageQuery {
    /// The id that the page before ended with; `None` on the first page.
    ///
    /// # Errors
    /// The token is not of this list.
    pub fn position(&self) -> Result<Option<i64>, InvalidToken> {
        if self.page_token.is_empty() {
            return Ok(None);
        }
        let of_this_list = || {
            let text = open_token(&self.page_token)?;
            let (filter, id) = text.split_once(':')?;
            if filter == self.filter() { id.parse().ok() } else { None }
        };
        of_this_list().map(Some).ok_or(InvalidToken)
    }

    /// Makes a page of `rows`, which hold one more than `page_size` when there is another page.
    pub fn page<R, V>(
        &self,
        mut rows: Vec<R>,
        id: impl Fn(&R) -> i64,
        view: impl FnMut(R) -> V,
    ) -> (Vec<V>, String) {
        let size = self.page_size as usize;
        let more = rows.len() > size;
        rows.truncate(size);
        let next = match rows.last() {
            Some(last) if more => seal_token(&format!("{}:{}", self.filter(), id(last))),
            Some(_) | None => String::new(),
        };
        (rows.into_iter().map(view).collect(), next)
    }

    fn filter(&self) -> &str {
        self.activity_id.as_ref().map_or("", ActivityId::as_str)
    }
}

/// Makes a token of a text, so that nobody takes it for one.
#[must_use]
pub fn seal_token(text: &str) -> String {
    text.bytes().map(|byte| format!("{byte:02x}")).collect()
}

/// The text of a token; `None` when it is none of ours.
#[must_use]
pub fn open_token(token: &str) -> Option<String> {
    let digit = |byte: u8| char::from(byte).to_digit(16);
    let bytes = token
        .as_bytes()
        .chunks(2)
        .map(|pair| match pair {
            [high, low] => u8::try_from(digit(*high)? * 16 + digit(*low)?).ok(),
            _ => None,
        })
        .collect::<Option<Vec<u8>>>()?;
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn query(activity: Option<&str>, token: &str) -> PageQuery {
        PageQuery {
            page_size: 2,
            page_token: token.to_owned(),
            activity_id: activity.map(|id| ActivityId::new(id).unwrap()),
        }
    }

    #[test]
    fn a_list_goes_on_where_the_page_before_ended() {
        let (page, token) = query(None, "").page(vec![9_i64, 8, 7], |id| *id, |id| id);
        assert_eq!(page, [9, 8]);
        assert_eq!(query(None, &token).position().unwrap(), Some(8));
        let (page, token) = query(None, &token).page(vec![7, 6], |id| *id, |id| id);
        assert_eq!((page, token.as_str()), (vec![7, 6], ""));
    }

    #[test]
    fn a_token_is_good_for_its_own_list_only() {
        let (_, token) = query(Some("a"), "").page(vec![1_i64, 2, 3], |id| *id, |id| id);
        assert_eq!(query(Some("a"), &token).position().unwrap(), Some(2));
        for (activity, token) in [(None, &*token), (Some("b"), &token), (None, "zz"), (None, "0")] {
            let refused = query(activity, token).position();
            assert_eq!(refused, Err(InvalidToken), "{token}");
        }
    }
}
