"use strict";
// Everything that comes from a document reaches the page as textContent, never as markup.
(() => {
  const root = document.documentElement;
  const THEME = "tokenmill-report-theme";
  const at = (id) => document.getElementById(id);

  const remembered = () => { try { return localStorage.getItem(THEME); } catch { return null; } };
  const remember = (theme) => { try { localStorage.setItem(THEME, theme); } catch { /* a page may have no storage */ } };
  const chosen = remembered();
  if (chosen === "light" || chosen === "dark") root.dataset.theme = chosen;

  document.addEventListener("DOMContentLoaded", () => { setUpTheme(); setUpBrowser(); });

  function setUpTheme() {
    const button = at("theme");
    const system = matchMedia("(prefers-color-scheme: dark)");
    const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
    const label = () => {
      button.textContent = isDark() ? "Light" : "Dark";
      button.setAttribute("aria-label", `Switch to the ${isDark() ? "light" : "dark"} theme`);
    };
    button.hidden = false;
    button.addEventListener("click", () => {
      root.dataset.theme = isDark() ? "light" : "dark";
      remember(root.dataset.theme);
      label();
    });
    system.addEventListener("change", label);
    label();
  }

  function make(name, className, text) {
    const element = document.createElement(name);
    if (className) element.className = className;
    if (text !== undefined) element.textContent = text;
    return element;
  }

  const count = (number, word) => `${number.toLocaleString("en")} ${word}${number === 1 ? "" : "s"}`;

  // The characters of a document with the ids behind each: mostly one id, several where they share a character.
  function groupsOf(one, data) {
    const shared = new Map((one.shared || []).map(([start, length, text]) => [start, [length, text]]));
    const groups = [];
    for (let i = 0; i < one.ids.length;) {
      const [length, text] = shared.get(i) || [1, data.pieces[one.ids[i]]];
      groups.push({ start: i, ids: one.ids.slice(i, i + length), text });
      i += length;
    }
    return groups;
  }

  function setUpBrowser() {
    const data = JSON.parse(at("data").textContent);
    const specials = new Set(data.specials);
    const entries = data.documents.map((one) => {
      const groups = groupsOf(one, data);
      const text = groups.map((group) => group.text).join("");
      const fields = [one.split, one.number, one.origin, ...Object.values(one.keys || {}), ...(one.notes || [])];
      return { one, groups, text, name: `${one.split}-${one.number}`, haystack: `${text}\n${fields.join("\n")}`.toLowerCase() };
    });
    if (!entries.length) {
      at("browser-about").textContent = "The store has no documents.";
      return;
    }
    at("panes").hidden = false;
    const [list, find, found, text, tip] = ["list", "find", "found", "text", "tip"].map(at);
    let shown = entries;
    let current = null;

    for (const entry of entries) {
      const item = make("li");
      item.id = `item-${entry.name}`;
      item.setAttribute("role", "option");
      const head = make("div", "head");
      head.append(make("span", "", `${entry.one.split} ${entry.one.number.toLocaleString("en")}`));
      head.append(make("span", "dim", count(entry.one.num_tokens, "token")));
      item.append(head, make("div", "snippet", entry.text.slice(0, 90).trim() || "(empty)"));
      for (const note of entry.one.notes || []) item.append(make("div", "snippet flag", note));
      item.addEventListener("click", () => select(entry));
      entry.item = item;
      list.append(item);
    }

    function select(entry, { scroll = true } = {}) {
      if (current) current.item.setAttribute("aria-selected", "false");
      current = entry;
      entry.item.setAttribute("aria-selected", "true");
      list.setAttribute("aria-activedescendant", entry.item.id);
      if (scroll) list.scrollTop += entry.item.getBoundingClientRect().top - list.getBoundingClientRect().top - list.clientHeight / 3;
      draw(entry);
      if (location.hash.slice(1) !== entry.name && scroll) {
        try { history.replaceState(null, "", `#${entry.name}`); } catch { /* some viewers forbid it */ }
      }
    }

    function step(by) {
      const place = shown.indexOf(current) + by;
      if (place >= 0 && place < shown.length) select(shown[place]);
    }

    function draw({ one, groups }) {
      hideTip();
      at("document-title").textContent = `${one.split}, document ${one.number.toLocaleString("en")}`;
      const facts = at("facts");
      facts.replaceChildren();
      const put = (name, value) => facts.append(make("dt", "", name), make("dd", "", value));
      put("tokens", one.num_tokens.toLocaleString("en"));
      if (one.origin) put("from", one.origin);
      for (const [name, value] of Object.entries(one.keys || {})) put(name, value);
      for (const note of one.notes || []) put("note", note);
      text.replaceChildren();
      text.scrollTop = 0;
      const trained = one.trained || [];
      groups.forEach((group, place) => {
        if (one.hidden && group.start === one.head) text.append(make("span", "gap", `… ${count(one.hidden, "more token")} …`));
        const token = make("span", `token ${place % 2 ? "b" : "a"}`, group.text.replaceAll("\n", "↵\n").replaceAll("\t", "⇥\t") || "∅");
        if (specials.has(group.ids[0])) token.classList.add("special");
        token.isTrained = trained.some(([start, stop]) => group.start < stop && group.start + group.ids.length > start);
        if (token.isTrained) token.classList.add("trained");
        token.tabIndex = place ? -1 : 0;
        token.group = group;
        text.append(token);
      });
      if (!groups.length) text.append(make("span", "gap", "This document has no tokens."));
      markHits();
    }

    function describe(token) {
      const { ids, start, text: piece } = token.group;
      const place = start + (current.one.hidden && start >= current.one.head ? current.one.hidden : 0);
      const what = `${ids.length > 1 ? "ids" : "id"} ${ids.join(" ")} · token ${place.toLocaleString("en")} · “${piece.replaceAll("\n", "↵").replaceAll("\t", "⇥")}”`;
      return data.supervised ? `${what} · ${token.isTrained ? "trained" : "not trained"}` : what;
    }

    function showTip(token) {
      const said = describe(token);
      if (tip.textContent !== said) tip.textContent = said;
      tip.hidden = false;
      const place = token.getClientRects()[0] || token.getBoundingClientRect();
      const below = place.bottom + 6 + tip.offsetHeight < innerHeight;
      tip.style.left = `${Math.max(4, Math.min(place.left, innerWidth - tip.offsetWidth - 8))}px`;
      tip.style.top = `${below ? place.bottom + 6 : place.top - tip.offsetHeight - 6}px`;
    }

    function hideTip() { tip.hidden = true; }

    const tokenOf = (event) => event.target.closest(".token");
    text.addEventListener("mouseover", (event) => { if (tokenOf(event)) showTip(tokenOf(event)); });
    text.addEventListener("mouseleave", hideTip);
    text.addEventListener("focusin", (event) => { if (tokenOf(event)) showTip(tokenOf(event)); });
    text.addEventListener("focusout", hideTip);
    // Moving the focus scrolls, so what is said of the token that has it must stay.
    const follow = () => { const token = document.activeElement.closest("#text .token"); if (token) showTip(token); else hideTip(); };
    text.addEventListener("scroll", follow);
    text.addEventListener("click", (event) => { if (tokenOf(event)) focusToken(tokenOf(event)); });
    addEventListener("scroll", follow, { passive: true });

    function focusToken(token) {
      text.querySelector('[tabindex="0"]').tabIndex = -1;
      token.tabIndex = 0;
      token.focus({ preventScroll: true });
      token.scrollIntoView({ block: "nearest", behavior: "instant" });
      showTip(token);
    }

    // The token in the line above or below that is nearest to where this one begins.
    function tokenInNextLine(tokens, place, by) {
      const here = tokens[place].getBoundingClientRect();
      let best = null;
      let line = null;
      for (let i = place + by; i >= 0 && i < tokens.length; i += by) {
        const there = tokens[i].getClientRects()[0];
        if (!there || (by > 0 ? there.top <= here.top + 2 : there.top >= here.top - 2)) continue;
        if (line !== null && Math.abs(there.top - line) > 2) break;
        line = there.top;
        if (!best || Math.abs(there.left - here.left) < best.far) best = { token: tokens[i], far: Math.abs(there.left - here.left) };
      }
      return best && best.token;
    }

    text.addEventListener("keydown", (event) => {
      const tokens = [...text.querySelectorAll(".token")];
      const place = tokens.indexOf(document.activeElement);
      if (place < 0 || event.ctrlKey || event.metaKey || event.altKey) return;
      const target = {
        ArrowRight: () => tokens[place + 1], ArrowLeft: () => tokens[place - 1],
        ArrowDown: () => tokenInNextLine(tokens, place, 1), ArrowUp: () => tokenInNextLine(tokens, place, -1),
        Home: () => tokens[0], End: () => tokens.at(-1),
      }[event.key];
      if (!target) return;
      event.preventDefault();
      const token = target();
      if (token) focusToken(token);
    });

    list.addEventListener("keydown", (event) => {
      const steps = { ArrowDown: 1, ArrowUp: -1, PageDown: 8, PageUp: -8, Home: -shown.length, End: shown.length };
      if (!(event.key in steps) || !shown.length) return;
      event.preventDefault();
      const place = Math.max(0, Math.min(shown.length - 1, shown.indexOf(current) + steps[event.key]));
      select(shown[place]);
    });

    // Single keys work only while something in the browser has the focus.
    at("browser").addEventListener("keydown", (event) => {
      if (event.target === find || event.ctrlKey || event.metaKey || event.altKey) return;
      if (event.key !== "j" && event.key !== "k" && event.key !== "/") return;
      event.preventDefault();
      if (event.key === "/") { find.focus(); return; }
      const wasInText = text.contains(document.activeElement);
      step(event.key === "j" ? 1 : -1);
      if (wasInText) (text.querySelector(".token") || list).focus({ preventScroll: true });
    });
    at("next").addEventListener("click", () => step(1));
    at("previous").addEventListener("click", () => step(-1));

    const wanted = () => {
      const typed = find.value.trim().toLowerCase();
      return /^#\d+$/.test(typed) ? { id: Number(typed.slice(1)) } : { text: typed };
    };

    function filter() {
      const { id, text: typed } = wanted();
      shown = entries.filter((entry) => (id !== undefined ? entry.one.ids.includes(id) : entry.haystack.includes(typed)));
      const there = new Set(shown);
      for (const entry of entries) entry.item.hidden = !there.has(entry);
      found.textContent = find.value.trim() ? `${shown.length.toLocaleString("en")} of ${count(entries.length, "document")}` : count(entries.length, "document");
      if (!current) return;
      if (shown.length && !there.has(current)) select(shown[0]);
      else markHits();
    }

    function markHits() {
      const { id, text: typed } = wanted();
      const tokens = [...text.querySelectorAll(".token")];
      for (const token of tokens) token.classList.remove("hit");
      if (id === undefined && !typed) return;
      if (id !== undefined) {
        for (const token of tokens) if (token.group.ids.includes(id)) token.classList.add("hit");
      } else {
        const pieces = tokens.map((token) => token.group.text.toLowerCase());
        const whole = pieces.join("");
        let token = 0;
        let end = pieces.length ? pieces[0].length : 0;
        for (let hit = whole.indexOf(typed); hit >= 0; hit = whole.indexOf(typed, hit + typed.length)) {
          while (end <= hit) end += pieces[++token].length;
          tokens[token].classList.add("hit");
          while (end < hit + typed.length) { end += pieces[++token].length; tokens[token].classList.add("hit"); }
        }
      }
      const first = text.querySelector(".hit");
      if (first) text.scrollTop += first.getBoundingClientRect().top - text.getBoundingClientRect().top - text.clientHeight / 3;
    }

    find.addEventListener("input", filter);
    find.addEventListener("keydown", (event) => {
      if (event.key === "Escape") { find.value = ""; filter(); }
      if (event.key === "ArrowDown" || event.key === "Enter") { event.preventDefault(); list.focus(); }
    });

    const byName = new Map(entries.map((entry) => [entry.name, entry]));
    function followHash() {
      const entry = byName.get(location.hash.slice(1));
      if (!entry) return false;
      if (!shown.includes(entry)) { find.value = ""; filter(); }
      select(entry);
      at("browser").scrollIntoView();
      list.focus({ preventScroll: true });
      return true;
    }
    addEventListener("hashchange", followHash);
    // A link to the document that the address names already changes no hash.
    document.addEventListener("click", (event) => {
      const link = event.target.closest('a[href^="#"]');
      if (link && link.hash === location.hash && byName.has(link.hash.slice(1))) { event.preventDefault(); followHash(); }
    });
    filter();
    if (!followHash()) select(entries[0], { scroll: false });
  }
})();
