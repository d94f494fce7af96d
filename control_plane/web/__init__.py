"""The web console: pages of a region, its jobs, machines and entitlements, for people.

The server renders each page from answers of the same routes that twinectl calls, with the same
roles and the same audit log. `core` turns answers into values for templates; `pages` has a row per
page; `serving` adds them to the front end's application (docs/web.md, docs/adr/0129).
"""
